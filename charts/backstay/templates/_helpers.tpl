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
