"""Adapters to other libraries. Each is imported by name and imports its library only then."""
