"""Every wait, retry and bound of the system in one place, with its default and the reason for it.

Nothing else in the project invents a timeout: it takes one of these fields.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """Defaults suit one machine or one rack. All times in seconds."""

    # --- a round of the token chain -------------------------------------------------------------------------------
    draft_deadline_s: float = 0.25  # longest a step waits for drafts; the cost of a hung draft before the circuit opens
    draft_deadline_min_s: float = 0.005  # a round never gets less, however short the target's step is
    answer_slack_s: float = 0.003  # beyond the deadline the draft works to: transport and scheduling of the answer
    reading_rest_s: float = 2.0  # longest a draft that still reads a prompt is left alone between two questions
    circuit_failures: int = 3  # missed deadlines in a row after which a draft is no longer asked
    circuit_pause_s: float = 0.5  # first pause of an open circuit; doubles with each failed probe
    circuit_pause_max_s: float = 10.0  # so that a draft that comes back is used again within seconds
    # --- sessions at the draft ------------------------------------------------------------------------------------
    session_lease_s: float = 60.0  # a session nobody advanced for so long is evicted (its target died or lost interest)
    prefill_budget_s: float = 0.5  # prompt tokens a draft reads between two answers, so one long prompt delays no other
    # --- draft channel --------------------------------------------------------------------------------------------
    channel_queue: int = 64  # messages waiting in one socket; a peer that is further behind loses messages, counted
    heartbeat_s: float = 1.0  # ZeroMQ heartbeats; a peer silent for three of them is reconnected
    discovery_period_s: float = 1.0  # how often a target asks Serve which draft replicas there are
    discovery_timeout_s: float = 5.0  # for one such question
    # --- KV on its way to drafts ----------------------------------------------------------------------------------
    kv_lease_s: float = 2.0  # memory with KV that a draft was told of is kept so long; it reads within one round
    kv_inline_bytes: int = 16 * 1024 * 1024  # of KV inside one message to a draft on another machine; half its bound
    # --- the target's hidden states, for drafts trained on them ---------------------------------------------------
    hidden_positions: int = 2048  # of each sequence, the last so many: what a draft that opens anew can be told
    hidden_bytes: int = 256 * 1024 * 1024  # of all sequences together; those that would exceed it draft without
    hidden_message_bytes: int = 8 * 1024 * 1024  # in the messages of one step; of a longer prompt the end is sent
    # --- the answer chain -----------------------------------------------------------------------------------------
    answer_drafts_s: float = (
        10.0  # drafts of models that are not there by then are not waited for: 64 tokens on a busy core
    )
    answer_handover_s: float = (
        0.5  # a draft hands over what it wrote by its deadline and so much more: it may be in a step
    )
    answer_evidence_s: float = 0.5  # the same for sources without a model
    answer_tags_s: float = 0.25  # a validator's tag that comes later is unknown
    answer_score_s: float = 5.0  # for the target's look at the drafts, before its answer begins
    answer_given_s: float = 0.1  # in token mode an answer waits so long for evidence that could speed it up
    # --- evidence for whole answers -------------------------------------------------------------------------------
    evidence_deadline_s: float = 2.0  # no caller waits longer for one source, whatever it asks for
    evidence_threads: int = 4  # of each source; a call that hangs takes one of them for as long as it hangs
    evidence_queue: int = 64  # calls waiting for one source; more are refused at once
    evidence_learn_queue: int = 256  # answers waiting to be remembered by one source; more are forgotten
    evidence_refresh_s: float = 5.0  # documents and rules that changed are noticed within so long
    evidence_lock_s: float = 20.0  # a new replica waits so long for the one it replaces to let go of the index
    rule_match_s: float = 0.02  # for matching one rule; a pattern that backtracks without end is given up
    # --- validators -----------------------------------------------------------------------------------------------
    validator_limit_s: float = 1.0  # one validator on one text; after it its process is killed and the tag is unknown
    validator_start_s: float = (
        120.0  # a validator process starts and imports the operator's functions, beside engines that start
    )
    validator_reclaim_s: float = 5.0  # a job taken from a stream and not answered for so long is another worker's
    validator_reply_s: float = 60.0  # after it nobody waits for a job in Redis, and answers nobody fetched expire
    # --- start and stop -------------------------------------------------------------------------------------------
    start_timeout_s: float = 600.0  # models load, engines compile
    drain_timeout_s: float = 10.0  # a stopping replica finishes or drops what it holds
    rpc_timeout_s: float = 10.0  # one control call into the engine
    # --- targets that are lost ------------------------------------------------------------------------------------
    target_retries: int = 4  # a request of which nothing was sent yet is asked again so often
    target_retry_pause_s: float = 0.2  # before the first of these; doubles, for a replica with a dead engine to leave
    engine_watch_s: float = 0.5  # a target replica sees within so long that its engine died, and leaves
    # --- metrics --------------------------------------------------------------------------------------------------
    metrics_period_s: float = 5.0  # counters reach Ray's metrics so often; Ray itself reports every ten seconds
    # --- requests -------------------------------------------------------------------------------------------------
    trace_keep_s: float = 60.0  # rounds of a finished request are kept so long for whoever asked for them
    trace_requests: int = 4096  # and for at most so many requests
