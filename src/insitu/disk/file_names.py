"""Which names from configurations, requests and model folders may become those of files."""

MAX_NAME_BYTES = 200
"""Length of a name that becomes a file's or folder's; file systems allow 255 bytes."""


def file_name_problem(name: str) -> str | None:
    """Why a name cannot be part of a file's name, in words that follow the name; None if it can."""
    if not name or name in (".", "..") or any(character in "/\\\0" for character in name):
        return "cannot be the name of a file; allowed: text without / and \\"
    if len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        return f"is too long for the name of a file; allowed: {MAX_NAME_BYTES} bytes"
    return None
