{{/* The operator's settings file; the Deployment carries its checksum. */}}
{{- define "backstay.operator.config" -}}
clusterName: {{ .Values.clusterName | quote }}
namespaces: {{ .Values.namespaces | toJson }}
sidecar:
  image: {{ include "backstay.image" (list . .Values.sidecar.image) | quote }}
  pullPolicy: {{ .Values.sidecar.image.pullPolicy | quote }}
  cpu: {{ .Values.sidecar.resources.cpu | quote }}
  memory: {{ .Values.sidecar.resources.memory | quote }}
  graceSeconds: {{ .Values.sidecar.graceSeconds | int64 }}
allow:
  serviceAccounts: {{ .Values.policy.allow.serviceAccounts | toJson }}
  hostPaths: {{ .Values.policy.allow.hostPaths | toJson }}
  localPaths: {{ .Values.policy.allow.localPaths | toJson }}
  privileged: {{ .Values.policy.allow.privileged }}
  remotes: {{ .Values.policy.allow.remotes | toJson }}
drainTaints: {{ .Values.operator.drainTaints | toJson }}
nodeLostSeconds: {{ .Values.operator.nodeLostSeconds | int64 }}
leaderElection:
  enabled: {{ .Values.operator.leaderElection.enabled }}
  leaseName: {{ include "backstay.operator.lease" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
ports:
  metrics: {{ .Values.operator.ports.metrics | int64 }}
  health: {{ .Values.operator.ports.health | int64 }}
log:
  level: {{ .Values.operator.log.level | quote }}
  format: {{ .Values.operator.log.format | quote }}
{{- end }}

{{- define "backstay.operator.lease" -}}
{{ default (include "backstay.operator.name" .) .Values.operator.leaderElection.leaseName }}
{{- end }}
