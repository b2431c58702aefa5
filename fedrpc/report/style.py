"""The page's style sheet: one set of rules, and two sets of colours for light and dark."""

from __future__ import annotations

_LIGHT = """
--ground:#f6f7f9;--card:#fff;--ink:#1b2733;--soft:#5b6b7a;--line:#dfe4ea;--grid:#e9edf1;--good:#15803d;--bad:#b45309;
--s0:#2f6fd0;--s1:#d97706;--s2:#0f9d76;--s3:#d64550;--s4:#7c5cd6;--s5:#0e9fb5;--s6:#c2559d;--s7:#7b8794;--s8:#8a9a1f;
--s9:#96683b;--s10:#4b5b94;--s11:#b3546b;--s12:#4d7c5f;--on:#fff;
"""
_DARK = """
--ground:#11161c;--card:#191f27;--ink:#e6ebf0;--soft:#95a3b1;--line:#2a333d;--grid:#252d36;--good:#4ade80;--bad:#fbbf24;
--s0:#5b9bf3;--s1:#f0a03c;--s2:#38c79c;--s3:#f0737c;--s4:#a48cf0;--s5:#41c3d8;--s6:#e084c0;--s7:#8593a1;--s8:#bccb4e;
--s9:#c79a68;--s10:#93a3dc;--s11:#dd92a3;--s12:#8fc3a3;--on:#0f151b;
"""
_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main,header,footer{max-width:1240px;margin:0 auto;padding:0 24px}
header{padding-top:36px}
h1{font-size:30px;line-height:1.2;margin:0;letter-spacing:-.015em}
h1 small{font-weight:400;color:var(--soft);font-size:.72em}
h2{font-size:20px;margin:44px 0 4px;letter-spacing:-.01em}
h3{font-size:14px;margin:0 0 6px;font-weight:600}
.lead,.caption,figcaption{color:var(--soft);font-size:13px;margin:0}
.lead{margin-bottom:14px;max-width:110ch}
.caption,figcaption{margin-top:8px}
.chips{display:flex;flex-wrap:wrap;gap:6px;margin:12px 0 22px}
.chips span{border:1px solid var(--line);background:var(--card);border-radius:99px;padding:2px 11px;font-size:13px;
color:var(--soft)}
.chips b{color:var(--ink);font-weight:600}
.tiles{display:flex;flex-wrap:wrap;gap:14px}
.tiles>*{flex:1 1 268px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:14px 16px;border-top:3px solid var(--s7)}
.tile.good{border-top-color:var(--good)}
.tile.bad{border-top-color:var(--bad)}
.tile .name{font-size:13px;color:var(--soft)}
.tile .value{font-size:25px;font-weight:650;letter-spacing:-.02em;line-height:1.35;font-variant-numeric:tabular-nums}
.tile.bad .value{color:var(--bad)}
.tile .note{font-size:13px;color:var(--soft)}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
.card{padding:16px 18px;margin:0;min-width:0}
.wide{grid-column:1/-1}
@media(max-width:820px){.grid{grid-template-columns:minmax(0,1fr)}main,header,footer{padding-left:14px;
padding-right:14px}}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--soft);margin-bottom:6px}
.legend span{display:inline-flex;align-items:center;gap:6px}
svg{display:block;width:100%;height:auto;font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums}
svg.key{width:11px;height:11px;flex:none}
line.grid{stroke:var(--grid);stroke-width:1}
line.base{stroke:var(--line);stroke-width:1}
line.level{stroke:var(--ink);stroke-dasharray:4 4;opacity:.55}
.tick,.axis,.note{fill:var(--soft)}
.ink{fill:var(--ink)}
polyline.ink{fill:none;stroke:var(--ink)}
text.halo{fill:var(--ink);stroke:var(--card);stroke-width:3px;paint-order:stroke}
text.strong{fill:var(--ink);font-weight:600;font-size:12px}
text.cell{fill:var(--ink);font-size:10.5px}
text.on{fill:var(--on)}
text.full{fill:#fff}
.kernel{fill:var(--grid);stroke:var(--soft)}
polyline{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
circle{stroke:var(--card);stroke-width:1.2}
circle.hit{fill:transparent;stroke:none}
polyline.thin{stroke-width:1.3;opacity:.85}
polyline.faint{stroke-width:.9;opacity:.22}
polyline.fainter{stroke-width:.8;opacity:.1}
polyline.strong{stroke-width:2.4}
polygon.band{opacity:.16}
.pale{opacity:.45}
.scroll{overflow-x:auto}
.scroll>svg{min-width:760px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{text-align:left;color:var(--soft);font-weight:600;font-size:12.5px}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--grid);vertical-align:top}
tbody tr:last-child td{border-bottom:0}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
th.num{white-space:normal}
th.num:last-child,td.num:last-child{padding-right:0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:0;font-size:13.5px}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(240px,1fr));gap:18px 28px}
.columns h4{margin:0 0 4px;font-size:13px}
details.card summary{cursor:pointer;font-weight:600;font-size:14px}
details[open] summary{margin-bottom:10px}
code{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--ground);border-radius:5px;
border:1px solid var(--line);padding:1px 6px;overflow-wrap:anywhere}
footer{color:var(--soft);font-size:13px;padding-top:32px;padding-bottom:40px}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}
"""
_SERIES = "".join(
    f".f{index}{{fill:var(--s{index})}}.l{index}{{stroke:var(--s{index})}}circle.l{index}{{fill:var(--s{index});stroke:var(--card)}}"
    for index in range(10)
)
# One colour for each kind of the wire, in the order of its enumeration.
_KINDS = "".join(
    f".k{kind}{{fill:var(--s{series})}}" for kind, series in enumerate((0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12))
)

_COLOURS = f":root{{color-scheme:light dark;{_LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}"

CSS = _COLOURS + _RULES + _SERIES + _KINDS
