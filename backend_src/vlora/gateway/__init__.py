"""The gateway: an HTTP server with the OpenAI API, in front of a V-LoRA server's gRPC endpoint.

It is a client of the model `lmm` and may run on another machine. `app.py` has the routes. `door.py`
checks who may use them. `requests.py` and `messages.py` read requests, `backend.py` asks the
server, and `answers.py` writes answers.
"""
