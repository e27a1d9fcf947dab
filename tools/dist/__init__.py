"""What `make dist` runs: builds the wheel and the sdist, checks them, and has each answer."""
