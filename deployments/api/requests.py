"""Request bodies: vLLM's own with the ``chain`` field, and no way for a malformed one to become a 500."""

from typing import Any

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, CompletionRequest

from deployments.api.chain_field import ChainField


def _validate(data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
    """vLLM's validators look into raw input and trip over unexpected types; that is the client's error, not ours."""
    try:
        return handler(data)
    except ValidationError:
        raise
    except (TypeError, AttributeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise ValueError(f"The request is malformed: {error}") from error


class ChainChatRequest(ChatCompletionRequest):
    """``/v1/chat/completions``."""

    chain: ChainField | None = Field(None, description="what to ask of the chain of draft")

    @model_validator(mode="wrap")
    @classmethod
    def _no_surprises(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        return _validate(data, handler)


class ChainCompletionRequest(CompletionRequest):
    """``/v1/completions``."""

    chain: ChainField | None = Field(None, description="what to ask of the chain of draft")

    @model_validator(mode="wrap")
    @classmethod
    def _no_surprises(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        return _validate(data, handler)
