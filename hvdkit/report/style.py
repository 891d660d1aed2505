"""The style sheet of a report: light and dark mode, narrow windows, and paper."""

STYLE = """
:root { LIGHT_COLORS --card: #ffffff; --page: #f6f7f9; --edge: #dfe3e8; }
@media (prefers-color-scheme: dark) {
  :root { DARK_COLORS --card: #1b1f24; --page: #101317; --edge: #343a42; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .75rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 .5rem; }
p { margin: 0 0 .6rem; max-width: 60rem; overflow-wrap: anywhere; }
.conclusion { font-size: 1.06rem; }
.summary { margin: 0 0 1rem; padding-left: 1.2rem; max-width: 60rem; overflow-wrap: anywhere; }
section, header, footer { background: var(--card); border: 1px solid var(--edge);
  border-radius: 8px; padding: 1.1rem 1.25rem; margin-bottom: 1.1rem; }
footer { color: var(--muted); font-size: .875rem; }
.charts { display: grid; gap: 1rem; align-items: start; margin: .5rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 42rem; }
figcaption { font-weight: 600; font-size: .95rem; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit !important; }
.table { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .25rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0;
  border-bottom: 1px solid var(--edge); }
td, tbody th { white-space: nowrap; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 16rem; }
tbody th { font-weight: 500; }
td.number, th.number { text-align: right; }
table.facts tbody th { color: var(--muted); }
details { margin: .4rem 0; }
summary { cursor: pointer; }
pre { font-size: .8rem; line-height: 1.4; padding: .75rem; overflow-x: auto;
  background: var(--page); border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  body { padding: .5rem; }
  section, header, footer { padding: .8rem; }
}
@media print {
  :root { LIGHT_COLORS --card: #ffffff; --page: #ffffff; --edge: #c9ced6; }
  @page { margin: 14mm; }
  body { padding: 0; max-width: none; font-size: 10.5pt; }
  section, header, footer { border: 0; padding: 0 0 4mm; margin: 0; }
  .charts { grid-template-columns: 1fr 1fr; }
  figure:only-child { grid-column: 1 / -1; max-width: 125mm; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .table, pre { overflow: visible; }
  table { font-size: 8.5pt; }
  td, tbody th { white-space: normal; }
  td.long { min-width: 0; }
}
"""
