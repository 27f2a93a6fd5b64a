{{/* What every namespace that is looked after needs: the jobs, and what is made of them. For a ClusterRole or a Role. */}}
{{- define "backstay.operator.jobRules" -}}
# the jobs: what is wanted
- apiGroups: [backstay.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch]
# a job whose time to live is over is deleted; its last durable step is written as annotation
- apiGroups: [backstay.dev]
  resources: [trainingjobs]
  verbs: [patch, delete]
# what the operator tells of a job
- apiGroups: [backstay.dev]
  resources: [trainingjobs/status]
  verbs: [get, patch]
# a job's pods: made with fixed names, deleted with their uid, taken out of selectors before a force-deletion
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
# a job's headless Service and topology
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, create, patch, delete]
# a job's token. Never list or watch: the operator knows the names, and sees no other Secret by chance
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, delete]
# claims of the local tier with the volume pvc: made once per replica, kept for the next pod
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create]
# a job's disruption budget; other budgets are looked for, since two on one pod make evictions fail
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, patch, delete]
# a job's network policy
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch, delete]
# what happened to a job, for people; repeated ones are counted up
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
