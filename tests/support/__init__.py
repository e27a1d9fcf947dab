"""Helpers that tests share; nothing here is collected as a test."""
