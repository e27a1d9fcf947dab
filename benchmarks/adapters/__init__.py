"""Many adapters: registered, resident, distinct and more than fit."""
