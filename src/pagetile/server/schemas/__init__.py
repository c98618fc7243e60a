"""The bodies of requests. A field is honoured or refused by name; none is ignored."""
