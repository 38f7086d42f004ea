"""Commands that take no option twice."""

from __future__ import annotations

import typer.core

from .core.errors import BadInput


class Command(typer.core.TyperCommand):
    """An option that is there twice is a slip: the parser would take the last and say nothing."""

    def parse_args(self, ctx, args):
        words = [word.partition("=")[0] for word in (args[: args.index("--")] if "--" in args else args)]
        asks_for_help = any(name in words for name in ctx.help_option_names)
        for option in (each for each in self.params if isinstance(each, typer.core.TyperOption)):
            takes_one = not option.multiple and not option.is_flag
            if takes_one and not asks_for_help and sum(words.count(name) for name in option.opts) > 1:
                raise BadInput(f"{option.opts[0]} is there twice: write it once, and several values with commas")
        return super().parse_args(ctx, args)
