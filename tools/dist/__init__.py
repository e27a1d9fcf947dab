"""Implementation of `make dist`: build and check wheel and sdist, and serve the demo with each."""
