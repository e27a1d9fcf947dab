"""Helpers that several tests share. Nothing here is collected as a test."""
