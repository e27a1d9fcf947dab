"""Implementation of `make dist`: build wheel and sdist, check them, and let each serve the demo."""
