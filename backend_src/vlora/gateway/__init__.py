"""The gateway: an HTTP server with the OpenAI API, in front of a V-LoRA server's gRPC endpoint."""
