"""Every error as an OpenAI error body, and none that a client caused as a 500."""

import logging
import re
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from ray.exceptions import RayActorError
from ray.llm._internal.serve.core.configs.openai_api_models import OpenAIHTTPException
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import JSONResponse

from deployments.api.requests import ChainChatRequest, ChainCompletionRequest
from deployments.config.errors import model_at, nearest

logger = logging.getLogger(__name__)

# vLLM's names for the kinds of error, by status
KINDS = {400: "BadRequestError", 404: "NotFoundError", 408: "TimeoutError", 429: "RateLimitError"}


class RequestError(Exception):
    """A request that cannot be served, with the status and the parameter at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.retry_after_s = message, param, status, retry_after_s


def body(message: str, status: int, param: str | None = None, kind: str | None = None) -> dict[str, Any]:
    """An OpenAI error body in vLLM's shape."""
    fallback = (
        "ServiceUnavailableError" if status == 503 else "InternalServerError" if status >= 500 else "BadRequestError"
    )
    kind = kind or KINDS.get(status, fallback)
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def response(message: str, status: int, param: str | None = None, retry_after_s: int = 0) -> JSONResponse:
    """The same as an HTTP answer."""
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s else None
    return JSONResponse(body(message, status, param), status_code=status, headers=headers)


def install(app: FastAPI, retry_after_s: int) -> None:
    """Register the handlers; they run inside Ray's last-resort ones and so come first."""

    async def request_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestError)
        return response(error.message, error.status, error.param, error.retry_after_s)

    async def validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        message, param = explain_request(error.errors())
        return response(message, 400, param)

    async def engine_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, OpenAIHTTPException)
        status = error.status_code if 400 <= int(error.status_code) < 600 else 500
        return response(error.message, int(status), parameter_in(error.message))

    async def http_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StarletteHTTPException)
        answer = response(str(error.detail), error.status_code)
        answer.headers.update(getattr(error, "headers", None) or {})
        return answer

    async def unavailable(_: Request, error: Exception) -> JSONResponse:
        logger.warning("no capacity: %s", error)
        return response("The target cannot take more requests now; try again shortly.", 503, None, retry_after_s)

    app.add_exception_handler(RequestError, request_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(OpenAIHTTPException, engine_error)
    app.add_exception_handler(StarletteHTTPException, http_error)
    app.add_exception_handler(HTTPException, http_error)

    async def lost(_: Request, error: Exception) -> JSONResponse:
        logger.warning("a target replica died: %s", error)
        return response("The target replica died before it answered; try again.", 503, None, retry_after_s)

    app.add_exception_handler(BackPressureError, unavailable)
    app.add_exception_handler(RayActorError, lost)
    app.add_exception_handler(DeploymentUnavailableError, unavailable)


def parameter_in(message: str) -> str | None:
    """vLLM ends its messages with ``(parameter=name, value=…)``; return the name."""
    _, found, rest = message.rpartition("(parameter=")
    return rest.split(",")[0].rstrip(")") if found else None


def explain_request(errors: Any) -> tuple[str, str | None]:
    """The first validation error as (sentence, parameter); an unknown key inside ``chain`` names the nearest."""
    if not errors:
        return "The request is not valid.", None
    item = errors[0]
    location = [part for part in item.get("loc", ()) if part != "body" and not _is_union_tag(part)]
    if item["type"] == "json_invalid":
        return f"The body is not valid JSON: {item.get('ctx', {}).get('error', item['msg'])}.", None
    if not location:
        if item["type"] == "value_error":
            return _reason(item), parameter_in(_reason(item))
        return "The body must be a JSON object.", None
    param = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        holder = next(
            (
                found
                for model in (ChainChatRequest, ChainCompletionRequest)
                if (found := model_at(model, location[:-1]))
            ),
            None,
        )
        return f"{param}: unknown key{nearest(str(location[-1]), holder.model_fields if holder else ())}", param
    if item["type"] == "missing":
        return f"{param}: required, but missing", param
    return f"{param}: {_reason(item)}", param


def _is_union_tag(part: str | int) -> bool:
    """Pydantic puts the tried member of a union into the path: a type's name, not a key of the request."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or bool(re.search(r"[A-Z\[]", part)))


def _reason(item: Any) -> str:
    error = item.get("ctx", {}).get("error")
    return str(error) if error is not None else str(item["msg"])
