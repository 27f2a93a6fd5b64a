{{/* Names and blocks that several templates share. */}}

{{- define "backstay.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "backstay.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "backstay.name" .) .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "backstay.name" .) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "backstay.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "backstay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: backstay
{{- end }}

{{- define "backstay.selector" -}}
app.kubernetes.io/name: {{ include "backstay.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "backstay.operator.name" -}}
{{ include "backstay.fullname" . }}-operator
{{- end }}

{{- define "backstay.operator.selector" -}}
{{ include "backstay.selector" . }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "backstay.operator.labels" -}}
{{ include "backstay.labels" . }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "backstay.operator.serviceAccount" -}}
{{- if .Values.operator.serviceAccount.create }}
{{- default (include "backstay.operator.name" .) .Values.operator.serviceAccount.name }}
{{- else }}
{{- required "operator.serviceAccount.name is needed when operator.serviceAccount.create is false" .Values.operator.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Image of a component: (list $ .Values.operator.image). A digest wins over a tag. */}}
{{- define "backstay.image" -}}
{{- $top := index . 0 }}{{ $image := index . 1 }}
{{- $registry := $image.registry | default $top.Values.global.imageRegistry }}
{{- $name := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") }}
{{- if $image.digest }}{{ printf "%s@%s" $name $image.digest }}
{{- else }}{{ printf "%s:%s" $name ($image.tag | default $top.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* ClusterRole or Role with what every watched namespace needs: the jobs and what is made of them. */}}
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
