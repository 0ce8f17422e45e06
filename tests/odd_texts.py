"""Text that others may write into names, errors and logs, and what nobody may be shown of it.

One table for all that shows text: pictures, reports, notebooks, terminals and the page.
"""

import re
from typing import Final

ODD_TEXTS: Final = {
    "a script": "<script>document.title = 'taken'</script>",
    "an end of a script": "</script></style></title><img src=x onerror=alert(1)>",
    "an attribute": "\"' onmouseover=alert(1) x='\"",
    "an address": "javascript:alert(1)",
    "entities": "&lt;b&gt; &#x1b;[2J &nbsp;&bogus;",
    "ends of XML": "]]><!-- --><![CDATA[ <?xml ?>",
    "a template": "${alert(1)} {{1+1}} {name} %s %(name)s",
    "markup of a terminal": "[bold]x[/bold] [link=https://example.org]y[/link] [/]",
    "a cleared screen": "\x1b[2J\x1b[31mred\x1b[0m",
    "the title of a terminal": "\x1b]0;title\x07",
    "other control characters": "a\x00b\x07\x08c\x7fd\x9b1Ae\rf",
    "right to left": "a\u202eb\u202c \u2066c\u2069 \u200f\u200e\u061c",
    "separators": "a\u2028b\u2029c",
    "lines": "one\ntwo\r\n\tthree",
    "Hebrew and Arabic": "שלום وداعا",
    "many marks": "Z" + "\u0301\u0302\u0323" * 20,
    "wide": "漢字" * 40,
    "pictures": "👩‍👩‍👧‍👦🧨🇩🇪",
    "a long word": "w" * 3000,
    "long": "many words " * 300,
}
"""By what they are."""

MOVING: Final = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
"""What moves a cursor, and what turns other text around: nobody is shown it."""
HARMFUL: Final = re.compile(rf"<script|<img src=x|{MOVING.pattern}")
"""The same, and markup of others: in no page."""
