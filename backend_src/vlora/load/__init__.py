"""A load generator: seeded traces of requests, their contents, and what a server made of them."""
