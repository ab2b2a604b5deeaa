"""What both ends of a draft channel know about KV that moves between them."""

import hashlib

SHARED_MEMORY, INLINE = "shared_memory", "inline"  # how KV reaches a draft: mapped memory, or inside the message
HIDDEN = "hidden"  # the same for a draft that takes no KV, but the target's last hidden states with each commit


def salt_of(tenant: str) -> bytes:
    """What keeps one tenant's KV apart from another's; 32 bytes."""
    return hashlib.sha256(b"tenant/" + tenant.encode()).digest()
