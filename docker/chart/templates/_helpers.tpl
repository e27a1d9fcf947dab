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
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
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

{{- /* Arguments of `vlora serve` in a pod: call with (dict "root" $ "http" PORT "grpc" PORT "grace" SECONDS). */ -}}
{{- define "vlora.serve" -}}
- serve
- --host=0.0.0.0
- --http-port={{ .http }}
- --grpc-port={{ .grpc }}
- --metrics-port={{ .root.Values.ports.metrics }}
- --options=/etc/vlora/model.json
- --grace={{ .grace }}
- --log=-
{{- if ne .root.Values.adapters.source "image" }}
- --adapters=/adapters
{{- end }}
{{- end }}

{{- /* Startup and readiness probes on HTTP: call with (dict "root" $ "http" PORT). */ -}}
{{- define "vlora.httpProbes" -}}
startupProbe:
  httpGet: {path: /v2/health/ready, port: {{ .http }}}
  {{- toYaml .root.Values.probes.startup | nindent 2 }}
readinessProbe:
  httpGet: {path: /v2/health/ready, port: {{ .http }}}
  {{- toYaml .root.Values.probes.readiness | nindent 2 }}
{{- end }}

{{- /* The liveness probe: call with (dict "root" $ "grpc" PORT "options" LIST); LIST holds its options for TLS. */ -}}
{{- define "vlora.livenessProbe" -}}
{{- with .root.Values.probes.liveness -}}
livenessProbe:
  exec:
    command:
      - vlora
      - probe
      - localhost:{{ $.grpc }}
      - --alive
      - --deadline={{ .deadlineSeconds }}
      - --metrics-port={{ $.root.Values.ports.metrics }}
      {{- range $.options }}
      - {{ . }}
      {{- end }}
  periodSeconds: {{ .periodSeconds }}
  failureThreshold: {{ .failureThreshold }}
  timeoutSeconds: {{ add .deadlineSeconds 5 }}
{{- end }}
{{- end }}

{{- define "vlora.resources" -}}
requests: {{- toYaml .Values.resources.requests | nindent 2 }}
limits:
  {{- toYaml .Values.resources.limits | nindent 2 }}
  {{- if .Values.gpu.enabled }}
  {{ .Values.gpu.resource }}: {{ .Values.gpu.count }}
  {{- end }}
{{- end }}

{{- /* Mounts and volumes that every server has. */ -}}
{{- define "vlora.mounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: scratch, mountPath: /tmp}
- {name: options, mountPath: /etc/vlora, readOnly: true}
{{- if ne .Values.adapters.source "image" }}
- {name: adapters, mountPath: /adapters, readOnly: true{{ with .Values.adapters.subPath }}, subPath: {{ . }}{{ end }}}
{{- end }}
{{- end }}

{{- define "vlora.volumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
- name: scratch
  emptyDir: {sizeLimit: {{ .Values.scratch }}}
- name: options
  configMap: {name: {{ include "vlora.name" . }}-options}
{{- if ne .Values.adapters.source "image" }}
{{ include "vlora.source" (dict "name" "adapters" "of" .Values.adapters) }}
{{- end }}
{{- end }}

{{- /* The security context of every container of the chart. */ -}}
{{- define "vlora.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Security settings of a pod or a container. KServe's runtimes can set only those of containers. */ -}}
{{- define "vlora.userSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "vlora.podSecurity" -}}
{{ include "vlora.userSecurity" . }}
fsGroup: 10001
{{- end }}

{{- /* Peers that may connect to the serving ports, besides the chart's own Envoy. */ -}}
{{- define "vlora.clients" -}}
{{ toYaml (.Values.networkPolicy.from | default (list (dict "podSelector" dict))) }}
{{- end }}

{{- define "vlora.envoySelector" -}}
app.kubernetes.io/name: vlora
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: envoy
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

{{- /* The configuration of files/envoy.yaml with the ports and certificates of the values, and the servers of the release. */ -}}
{{- define "vlora.envoyConfig" -}}
{{- $config := .Files.Get "files/envoy.yaml" | replace "x-lora-adapter" .Values.envoy.hashHeader | fromYaml }}
{{- $servers := printf "%s-headless.%s.svc" (include "vlora.name" .) .Release.Namespace }}
{{- $_ := set $config.admin.address.socket_address "port_value" .Values.envoy.adminPort }}
{{- range $config.static_resources.listeners }}
{{- $_ := set .address.socket_address "port_value" (eq .name "health" | ternary $.Values.envoy.healthPort $.Values.envoy.port) }}
{{- if and $.Values.tls.enabled (eq .name "serving") }}
{{- $_ := set (first .filter_chains) "transport_socket" (include "vlora.envoyDownstreamTls" $ | fromYaml) }}
{{- end }}
{{- end }}
{{- range $config.static_resources.clusters }}
{{- $endpoint := (first (first .load_assignment.endpoints).lb_endpoints).endpoint }}
{{- if eq .name "admin" }}
{{- $_ := set $endpoint.address.socket_address "port_value" $.Values.envoy.adminPort }}
{{- else }}
{{- $port := eq .name "servers_grpc" | ternary $.Values.ports.grpc $.Values.ports.http }}
{{- $_ := set $endpoint.address "socket_address" (dict "address" $servers "port_value" $port) }}
{{- $_ := set $endpoint.health_check_config "port_value" $.Values.ports.http }}
{{- if and $.Values.tls.enabled (eq .name "servers_grpc") }}
{{- $_ := mergeOverwrite . (include "vlora.envoyUpstreamTls" $ | fromYaml) }}
{{- range .health_checks }}{{ $_ := set . "transport_socket_match_criteria" (dict "plain" true) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{- define "vlora.envoyDownstreamTls" -}}
name: envoy.transport_sockets.tls
typed_config:
  "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
  {{- if .Values.tls.clientCa }}
  require_client_certificate: true
  {{- end }}
  common_tls_context:
    alpn_protocols: [h2, http/1.1]
    tls_certificates:
      - certificate_chain: {filename: /tls/tls.crt}
        private_key: {filename: /tls/tls.key}
    {{- with .Values.tls.clientCa }}
    validation_context: {trusted_ca: {filename: /tls/{{ . }}}}
    {{- end }}
{{- end }}

{{- /* TLS to the servers. The health checks use HTTP, which has none. */ -}}
{{- define "vlora.envoyUpstreamTls" -}}
transport_socket:
  name: envoy.transport_sockets.tls
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
    sni: {{ include "vlora.tlsName" . }}
    common_tls_context:
      validation_context:
        trusted_ca: {filename: /tls/ca.crt}
        match_typed_subject_alt_names:
          - {san_type: DNS, matcher: {exact: {{ include "vlora.tlsName" . }}}}
      {{- if .Values.tls.clientCa }}
      tls_certificates:
        - certificate_chain: {filename: /tls/tls.crt}
          private_key: {filename: /tls/tls.key}
      {{- end }}
transport_socket_matches:
  - name: plain
    match: {plain: true}
    transport_socket:
      name: envoy.transport_sockets.raw_buffer
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer
{{- end }}

{{- /* Options of a client of the server in its own pod; none without TLS. */ -}}
{{- define "vlora.clientTls" -}}
{{- if .Values.tls.enabled -}}
- --tls-ca=/tls/ca.crt
- --tls-name={{ include "vlora.tlsName" . }}
{{- if .Values.tls.clientCa }}
- --tls-key=/tls/tls.key
- --tls-certificate=/tls/tls.crt
{{- end }}
{{- end }}
{{- end }}
