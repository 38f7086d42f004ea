"""Run folders: written, read, compared, used again."""
