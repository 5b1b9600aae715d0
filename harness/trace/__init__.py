"""Traces of requests: read from files, or made from a seed."""
