// Before the page is drawn, so that it does not flash in the other theme.
try {
  document.documentElement.dataset.theme = JSON.parse(localStorage.getItem("specdec.settings")).theme;
} catch {
  // Nothing is stored yet, or nothing can be read: the theme is that of the system.
}
