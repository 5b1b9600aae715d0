"""Engines that run on kvpact. Each imports its engine when it is loaded, and not before."""
