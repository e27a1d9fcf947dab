"""Scheduling policies on seeded traces."""
