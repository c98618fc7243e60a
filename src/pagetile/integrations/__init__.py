"""Drop-ins for other libraries' models."""
