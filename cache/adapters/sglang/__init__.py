"""SGLang's hierarchical cache on kvpact: a general plugin, see docs/sglang.md."""
