"""Whose request it is: a name that says nothing about the credential it was made from."""

import hashlib

ANONYMOUS = "anonymous"
_KEY = b"chain tenant"  # separates these hashes from others of the same credential; every router must make the same


def tenant_of(credential: str | None, share_anonymous: bool) -> str:
    """The tenant of a request with this header value; "" is a tenant that shares nothing between its requests."""
    if credential:
        return hashlib.blake2b(credential.encode(), key=_KEY, digest_size=16).hexdigest()
    return ANONYMOUS if share_anonymous else ""
