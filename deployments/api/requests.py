"""Request bodies: vLLM's own with the ``chain`` field, and no way for a malformed one to become a 500."""

from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    StrictStr,
    ValidationError,
    model_validator,
)
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.exceptions import VLLMValidationError

from deployments.api.chain_field import ChainField


def _validate(data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
    """vLLM's validators look into raw input and trip over unexpected types; that is the client's error, not ours."""
    try:
        _require_unicode(data)
        return handler(data)
    except ValidationError:
        raise
    except VLLMValidationError as error:
        raise ValueError(str(error)) from error
    except (TypeError, AttributeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise ValueError(f"The request is malformed: {error}") from error


def _require_unicode(data: Any) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    if isinstance(data, str):
        if not data.isascii():
            try:
                data.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"The request holds text that is not valid Unicode: {error.reason}.") from None
    elif isinstance(data, dict):
        for key, value in data.items():
            _require_unicode(key)
            _require_unicode(value)
    elif isinstance(data, list):
        for value in data:
            _require_unicode(value)


class PredictionPart(BaseModel):
    """A part of a prediction's content."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: StrictStr


class Prediction(BaseModel):
    """OpenAI's Predicted Outputs: text that the answer is expected to be, or to resemble."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["content"]
    content: StrictStr | list[PredictionPart]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChainChatRequest(ChatCompletionRequest):
    """``/v1/chat/completions``."""

    chain: ChainField | None = Field(default=None, description="what to ask of the chain of draft")
    prediction: Prediction | None = Field(default=None, description="a draft of the answer")

    @model_validator(mode="wrap")
    @classmethod
    def _no_surprises(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        return _validate(data, handler)

    @model_validator(mode="after")
    def _validate_parts(self) -> "ChainChatRequest":
        """Pydantic leaves content parts in a lazy iterator that validates when read: read it now, as a 400 still can be."""
        for index, message in enumerate(self.messages):
            content = message.get("content") if isinstance(message, dict) else None
            if content is None or isinstance(content, str | list):
                continue
            try:
                message["content"] = list(content)  # type: ignore[index, unused-ignore]
            except ValidationError as error:
                raise ValueError(f"messages.{index}.content: {error.errors()[0]['msg']}") from None
        return self


class ChainCompletionRequest(CompletionRequest):
    """``/v1/completions``."""

    chain: ChainField | None = Field(default=None, description="what to ask of the chain of draft")

    @model_validator(mode="wrap")
    @classmethod
    def _no_surprises(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        return _validate(data, handler)
