"""Measure a job: its communication, its memory, its time.

    recorder          every collective and message of a function; PyTorch's flight recorder: which one never ended
    live_memory       bytes of states, and of what autograd saves
    step_time         compute, communication and waiting of a step; traces of every rank

Read `recorder` first. Chapters 02 to 11.
"""

from lablib.launch.measure.live_memory import CurrentOperator, LiveBytes, measure_states, saved_activations
from lablib.launch.measure.recorder import (
    Call,
    CommEvent,
    CommLog,
    compare_flight_records,
    debug_messages,
    dump_flight_record,
    flight_recorder_settings,
    mismatched_collectives,
    read_flight_records,
    record_comms,
)
from lablib.launch.measure.step_time import linear_stack, medians, record_trace, step_times, step_traces, trace_spans

__all__ = [
    "Call",
    "CommEvent",
    "CommLog",
    "CurrentOperator",
    "LiveBytes",
    "compare_flight_records",
    "debug_messages",
    "dump_flight_record",
    "flight_recorder_settings",
    "linear_stack",
    "measure_states",
    "medians",
    "mismatched_collectives",
    "read_flight_records",
    "record_comms",
    "record_trace",
    "saved_activations",
    "step_times",
    "step_traces",
    "trace_spans",
]
