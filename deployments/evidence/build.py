"""The sources a configuration asks for, and what is wrong with it before anything is started."""

from pathlib import Path

from deployments.chain.faults import FaultPolicy
from deployments.config import AppConfig
from deployments.config.models import Evidence
from deployments.evidence.documents import Documents
from deployments.evidence.history import History
from deployments.evidence.index import Index
from deployments.evidence.retrieval import RetrievalSource
from deployments.evidence.rules import RulesError, RuleSource, load_rules
from deployments.evidence.sentences import Length
from deployments.evidence.source import Source
from deployments.evidence.templates import TemplateSource
from hw.onnx.sentences import SentenceModel


def make_sources(spec: Evidence, faults: FaultPolicy) -> list[Source]:
    """The configured sources, retrieval with its refreshing started.

    Raises:
        IndexLocked: another process still has the index after ``faults.evidence_lock_s``.
        RulesError: the rules cannot be used.
        FileNotFoundError: there is no sentence model.
    """
    sources: list[Source] = []
    if spec.rules is not None:
        sources.append(RuleSource(spec.rules, faults))
    if spec.templates:
        sources.append(TemplateSource())
    if spec.retrieval:
        source = make_retrieval(spec, faults)
        source.start()
        sources.append(source)
    return sources


def make_retrieval(spec: Evidence, faults: FaultPolicy) -> RetrievalSource:
    """Retrieval over what is configured, nothing refreshed yet. Raises as :func:`make_sources`."""
    assert spec.index is not None
    model = SentenceModel(spec.sentences, threads=spec.threads)
    name = model.manifest.key

    def index(part: str) -> Index:
        return Index(Path(spec.index or "") / part, model.dimension, name, faults.evidence_lock_s)

    return RetrievalSource(
        model,
        faults,
        documents=Documents(spec.documents, index("documents"), model) if spec.documents is not None else None,
        history=History(index("history")) if spec.history else None,
        similarity=spec.similarity,
        answer_similarity=spec.answer_similarity,
    )


def make_length(target_model: str | Path) -> Length:
    """Measures text in the tokens of the target, a checkpoint folder."""
    return Length(Path(target_model) / "tokenizer.json")


def evidence_problems(config: AppConfig, root: str = "args") -> list[str]:
    """One sentence for each path that is not there and each rule that is wrong."""
    spec = config.evidence
    if spec is None:
        return []
    problems = []
    if spec.documents is not None and not spec.documents.is_dir():
        problems.append(f"{root}.evidence.documents: no folder {spec.documents}")
    if spec.index is not None and spec.index.exists() and not spec.index.is_dir():
        problems.append(f"{root}.evidence.index: {spec.index} is not a folder")
    if spec.documents is not None and spec.index is not None and spec.index.is_relative_to(spec.documents):
        problems.append(f"{root}.evidence.index: lies inside documents, which is never written to")
    if spec.retrieval and not (spec.sentences / "model.onnx").is_file():
        problems.append(f"{root}.evidence.sentences: no sentence model in {spec.sentences}; run scripts/prepare_models")
    if spec.rules is not None:
        try:
            load_rules(spec.rules, config.fault_policy)
        except RulesError as error:
            problems += [f"{root}.evidence.rules: {problem}" for problem in error.problems]
    return problems
