"""How a report looks: light and dark, from 360 pixels to a wide screen, and on paper.

The colors are those of Okabe and Ito, which people with common color blindness can tell
apart, darkened or lightened where they would fade into the ground. Shape or position shows the same
again.
"""

from __future__ import annotations

from megatrain.step.ops import SPECS

STYLE = """
:root{color-scheme:light dark;
--ground:#fff;--ink:#1c2127;--soft:#59636e;--edge:#d5dbe1;--card:#f5f7f9;
--c0:#0072b2;--c1:#d55e00;--c2:#00875f;--c3:#b0508a;--c4:#a87400;--c5:#3a9bd9;--c6:#5a5a5a;
--gold:#e69f00;--sky:#56b4e9;--yellow:#e0cf20;--grey:#8c959f;--alarm:#c4241b}
@media(prefers-color-scheme:dark){:root{
--ground:#14171b;--ink:#e4e8ec;--soft:#9ba5b0;--edge:#343b43;--card:#1d2227;
--c0:#4aa8e8;--c1:#f08a3c;--c2:#25b98b;--c3:#e08fc0;--c4:#e6b030;--c5:#8fd0f7;--c6:#b8b8b8;
--gold:#e69f00;--sky:#8fd0f7;--yellow:#f0e442;--grey:#7b858f;--alarm:#ff7b72}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0 auto;max-width:90rem;padding:1rem clamp(.75rem,3vw,2.5rem) 4rem;
background:var(--ground);
color:var(--ink);font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:.5rem 0}
h2{font-size:1.2rem;margin:2.5rem 0 .75rem;padding-bottom:.3rem;
border-bottom:1px solid var(--edge)}
h3{font-size:1rem;margin:1.25rem 0 .5rem}
h4{font-size:.85rem;margin:.75rem 0 .25rem;color:var(--soft)}
a{color:var(--c0)}
nav ul,.legend{display:flex;flex-wrap:wrap;gap:.25rem 1rem;padding:0;margin:.5rem 0;
list-style:none;
font-size:.875rem}
.lead{font-size:1.15rem;max-width:60rem}
.note,.unit,footer{color:var(--soft);font-size:.85rem;font-weight:normal}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;
margin:1rem 0}
.cards div{background:var(--card);border-radius:.5rem;padding:.6rem .8rem}
dt{font-size:.8rem;color:var(--soft)}
dd{margin:0;font-size:1.15rem;font-weight:600;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,32rem),1fr));
gap:1.5rem 2.5rem}
.charts>*{min-width:0}
figure{margin:1rem 0}
.charts figure{margin:0}
figcaption{font-weight:600;margin-bottom:.5rem}
.frame{position:relative;height:15rem;margin:.5rem 0 1.6rem 3.4rem}
.frame svg,.rows svg{display:block;width:100%;height:100%}
.frame svg{border-bottom:1px solid var(--soft);overflow:visible}
.labels span,.lost{position:absolute;font-size:.75rem;line-height:1rem;color:var(--soft);
white-space:nowrap;
font-variant-numeric:tabular-nums}
.labels .y{right:calc(100% + .4rem);transform:translateY(50%)}
.labels .x{top:calc(100% + .25rem);transform:translateX(-50%)}
.labels .end{transform:translateX(-80%)}
.lost{top:-.5rem;transform:translateX(-50%);color:var(--alarm);font-weight:bold}
path{vector-effect:non-scaling-stroke;stroke-linejoin:round}
.grid{stroke:var(--edge);stroke-width:1}
svg .faint,svg .strong,svg .dots{fill:none;stroke:var(--c)}
svg .faint{stroke-width:1;opacity:.38}
svg .strong{stroke-width:2.25}
svg .dots{stroke-width:1.5;stroke-dasharray:2 3}
svg .dot{fill:none;stroke:var(--c);stroke-width:8;stroke-linecap:round}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}
.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}
svg .again{stroke-dasharray:7 4}
.legend li{display:flex;align-items:center;gap:.4rem}
.swatch{display:inline-block;flex:none;width:1.1rem;height:.75rem;background:var(--k);
border-radius:2px}
.swatch.faint,.swatch.strong{height:0;background:none;border-radius:0;
border-top:1px solid var(--c);opacity:.6}
.swatch.strong{border-top-width:3px;opacity:1}
.swatch.again{border-top-style:dashed}
.swatch.dots{width:.6rem;height:.6rem;border-radius:50%;background:var(--c)}
.swatch.none{display:none}
.k-compute{--k:var(--c0)}.k-data{--k:var(--sky)}.k-issue{--k:var(--c4)}.k-other,.k-wait{--k:var(--grey)}
svg [class^=k-]{fill:var(--k)}
svg .narrow{stroke:var(--k);stroke-width:.3}
.shares{display:block;width:100%;height:1.75rem;border-radius:.3rem}
.swatch.k-wait{height:.25rem}
.timeline{display:flex;gap:.6rem;margin-bottom:1.8rem}
.lanes{display:grid;grid-template-rows:repeat(var(--lanes),1fr);flex:none;font-size:.85rem;
line-height:1.15}
.lanes span{align-self:center}
.lanes small{display:block;color:var(--soft);font-size:.7rem}
.rows{position:relative;flex:1;min-width:0;height:calc(var(--lanes)*2.75rem);
background:repeating-linear-gradient(var(--card) 0 calc(2.75rem - 2px),var(--ground) 0 2.75rem)}
.wide{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.9rem;min-width:min(100%,30rem)}
th,td{text-align:left;vertical-align:top;padding:.3rem .9rem .3rem 0;
border-bottom:1px solid var(--edge);
min-width:4.5rem}
th{font-weight:500;color:var(--soft)}
tbody th{overflow-wrap:break-word}
td:has(.state){width:6rem}
td:has(.state)+th{width:9rem}
thead th{color:var(--ink);font-weight:600}
td{font-variant-numeric:tabular-nums}
.number{text-align:right;white-space:nowrap;padding-right:0}
details .number{padding-left:.9rem}
figure table{width:100%;min-width:0}
figure th{width:34%}
.bars{width:46%;min-width:3rem}
.bar{display:block;width:100%;height:1rem;margin-top:.25rem}
.part{fill:var(--grey)}.planned{fill:var(--c0)}.measured{fill:var(--c1)}
tr.planned th,tr.measured th,tr.planned .number,tr.measured .number{color:var(--ink);
font-weight:600}
.state{font-weight:600;white-space:nowrap}
.ok{color:var(--c2)}.slow{color:var(--c4)}.wrong{color:var(--alarm)}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--card);
border-radius:.2rem;padding:.1em .3em}
pre{white-space:pre-wrap;font:.85rem/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
background:var(--card);border-radius:.4rem;padding:.7rem .9rem;margin:.25rem 0;tab-size:4}
.prompt{border-left:3px solid var(--c0);border-radius:0 .4rem .4rem 0}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));
gap:0 1.25rem}
details{margin:.75rem 0}
summary{cursor:pointer;color:var(--c0);font-size:.9rem}
:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
@media(max-width:40rem){.frame{height:12rem;margin-left:2.9rem}h2{margin-top:2rem}}
@media print{nav{display:none}figure,article{break-inside:avoid}}
"""
STYLE += "".join(f".k-{kind}{{--k:var(--{spec.color})}}" for kind, spec in SPECS.items())
