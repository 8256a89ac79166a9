"""Fields that OpenAI's API has and this server has not: what a client that sends one is told to do."""

from __future__ import annotations

_LEAVE_OUT = "leave it out"

INSTEAD = {
    "audio": "answers are text only; leave it out",
    "chat_template": "the model's own chat template is used; leave it out",
    "chat_template_kwargs": "the model's own chat template is used; leave it out",
    "function_call": "it is superseded; use tool_choice",
    "functions": "it is superseded; use tools",
    "guided_choice": "use response_format with type regex",
    "guided_json": "use response_format with type json_schema",
    "guided_regex": "use response_format with type regex",
    "metadata": "nothing is stored; leave it out",
    "moderation": _LEAVE_OUT,
    "prediction": _LEAVE_OUT,
    "prompt_cache_key": "prefixes are cached whoever sends them; leave it out",
    "prompt_cache_retention": "prefixes are cached whoever sends them; leave it out",
    "reasoning_effort": _LEAVE_OUT,
    "safety_identifier": "use user",
    "structured_outputs": "use response_format",
    "verbosity": _LEAVE_OUT,
    "web_search_options": _LEAVE_OUT,
}
