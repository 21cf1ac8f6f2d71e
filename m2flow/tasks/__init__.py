"""Tasks of language models: what they are asked, one file per origin, loaded by registry name (kind `env`)."""
