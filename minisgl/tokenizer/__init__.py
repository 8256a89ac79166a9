"""Chapter 14, the part without processes: text to token ids, and ids back to text while they are still coming."""

from minisgl.tokenizer.detokenizer import IncrementalDetokenizer
from minisgl.tokenizer.stop_strings import StopStrings
from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopStrings", "TextStream", "Tokenizer"]
