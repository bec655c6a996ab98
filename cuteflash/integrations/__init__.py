"""Adapters to other libraries. Each is imported by name and asks for its library only then."""
