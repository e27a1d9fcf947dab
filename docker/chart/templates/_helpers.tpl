{{- define "vlora.name" -}}
{{- default .Chart.Name .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "vlora.selector" -}}
app.kubernetes.io/name: vlora
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "vlora.labels" -}}
{{ include "vlora.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "vlora.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "vlora.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "vlora.name" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{- /* The pod's grace: preStop, then the server's own drain, then a margin. */ -}}
{{- define "vlora.grace" -}}
{{ add .Values.drain.preStopSeconds .Values.drain.seconds .Values.drain.margin }}
{{- end }}

{{- /* The name that the servers' certificate carries. */ -}}
{{- define "vlora.tlsName" -}}
{{ .Values.tls.name | default (printf "%s.%s.svc" (include "vlora.name" .) .Release.Namespace) }}
{{- end }}

{{- /* What is allowed to no container of the chart. */ -}}
{{- define "vlora.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "vlora.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* A volume for `checkpoint` or `adapters`: call with (dict "name" … "of" …). */ -}}
{{- define "vlora.source" -}}
- name: {{ .name }}
{{- if eq .of.source "claim" }}
  persistentVolumeClaim: {claimName: {{ required (printf "%s.claim is needed with source: claim" .name) .of.claim }}, readOnly: true}
{{- else }}
  image: {reference: {{ required (printf "%s.reference is needed with source: ociImage" .name) .of.reference }}, pullPolicy: IfNotPresent}
{{- end }}
{{- end }}
