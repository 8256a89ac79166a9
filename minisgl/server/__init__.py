"""Chapter 15: an OpenAI-compatible server over the engine. Chapter 14's processes meet here."""
