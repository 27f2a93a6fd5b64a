{{/* What every namespace that is looked after needs: the jobs, and what is made of them. For a ClusterRole or a Role. */}}
{{- define "backstay.operator.jobRules" -}}
# the jobs: what is wanted
- apiGroups: [backstay.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch]
# a job whose time to live is over is deleted; its last durable step and time are annotations, for schedulers
- apiGroups: [backstay.dev]
  resources: [trainingjobs]
  verbs: [patch, delete]
# what the operator tells of a job
- apiGroups: [backstay.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
# a job's pods: made with fixed names, deleted with their uid, taken out of selectors before a force-deletion
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
# a job's headless Service and topology, by server-side apply; they go with their job
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [create, patch]
# a job's token, made anew when it is of an earlier job of that name. Never list or watch: the operator knows the
# names, and sees no other Secret by chance
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, delete]
# claims of the local tier with the volume pvc: made once per replica, used again by the next pod
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [create]
# a job's disruption budget, by server-side apply; it goes with its job
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, patch]
# budgets of others that select a job's pods too: with two, every eviction is refused, and a condition says so
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list]
# a job's network policy, by server-side apply; it goes with its job
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, patch]
# what happened to a job, for people; repeated ones are counted up
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
