"""Chapter 14, the part with processes: what they say to each other, over which sockets, and how a child lives."""

from minisgl.errors import Failure
from minisgl.messages.jobs import Abort, Conversation, Question, Stop, Submit, Tokenized
from minisgl.messages.replies import Accepted, Rejected, Reply, Told, Update
from minisgl.messages.steps import Begun, Finished, Progress, Started, Token

__all__ = [
    "Abort",
    "Accepted",
    "Begun",
    "Conversation",
    "Failure",
    "Finished",
    "Progress",
    "Question",
    "Rejected",
    "Reply",
    "Started",
    "Stop",
    "Submit",
    "Token",
    "Tokenized",
    "Told",
    "Update",
]
