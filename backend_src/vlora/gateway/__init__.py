"""The gateway: an HTTP server with the OpenAI API, in front of a V-LoRA server's gRPC endpoint.

`app.py` defines the routes. `door.py` checks API keys, origins and rate limits. `requests.py` and
`messages.py` parse requests, `backend.py` sends them to the server, and `answers.py` writes the
responses.
"""
