"""Bytes on their way: copies and storage requests in flight, and the pages they hold."""
