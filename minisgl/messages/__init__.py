"""Chapter 14, the part with processes: what they say to each other, over which sockets, and how a child lives."""

from minisgl.errors import Failure
from minisgl.messages.jobs import Abort, Conversation, StatsRequest, Stop, Submit, Tokenized
from minisgl.messages.replies import Accepted, Rejected, Reply, StatsReply, Update
from minisgl.messages.steps import Finished, Progress, RequestAccepted, Started, Token

__all__ = [
    "Abort",
    "Accepted",
    "Conversation",
    "Failure",
    "Finished",
    "Progress",
    "Rejected",
    "Reply",
    "RequestAccepted",
    "Started",
    "StatsReply",
    "StatsRequest",
    "Stop",
    "Submit",
    "Token",
    "Tokenized",
    "Update",
]
