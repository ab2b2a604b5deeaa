"""A vLLM KV connector: prompts read by one replica, answered by another (docs/kv_plane.md)."""
