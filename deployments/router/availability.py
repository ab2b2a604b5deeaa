"""How many replicas of a deployment a handle can reach right now."""

from ray.serve.handle import DeploymentHandle


def replica_count(handle: DeploymentHandle) -> int:
    """Count without a call: the handle's router is told by the controller.

    Serve's public API only says whether there *ever* was a replica, and a request sent while there is none waits without
    end; hence the look inside.
    """
    if not handle.is_initialized:
        handle._init()
    router = handle._router
    inner = getattr(router, "_asyncio_router", router)
    request_router = getattr(inner, "_request_router", None)
    if request_router is None:
        return 0
    return len(request_router.curr_replicas)
