// What of the page lies over something else, comes before what it follows, or reaches out of its
// place: evaluated in the page. What scrolls by itself, pictures and hidden words are left out.
() => {
  const SCROLLS = ".scroll, ol.events, .grid";
  const found = [];
  const name = (each) => {
    const words = (each.getAttribute("aria-label") || each.innerText || "").slice(0, 40);
    return `${each.tagName.toLowerCase()} “${words.replaceAll("\n", " ")}”`;
  };
  const isShown = (each) => each.checkVisibility() && !each.closest(".hidden, option")
    && getComputedStyle(each).position === "static" && each.getBoundingClientRect().width > 0;
  for (const each of document.querySelectorAll("header *, main *")) {
    const scrolls = each.closest(`${SCROLLS}, svg, pre`);
    if (!isShown(each) || (scrolls && scrolls !== each)) continue;
    const outer = each.getBoundingClientRect();
    if (outer.right > innerWidth + 1 || outer.left < -1) found.push(`${name(each)} reaches out`);
    if (each.matches(`${SCROLLS}, svg, pre, select`)) continue;
    const inside = [...each.children].filter(isShown);
    inside.forEach((one, at) => {
      const a = one.getBoundingClientRect();
      const isLow = getComputedStyle(one).display !== "inline" && a.bottom > outer.bottom + 2;
      if (isLow) found.push(`${name(one)} reaches below ${name(each)}`);
      for (const other of inside.slice(at + 1)) {
        const b = other.getBoundingClientRect();
        const isBeside = a.right <= b.left + 1 || b.right <= a.left + 1;
        const isApart = isBeside || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
        if (!isApart) found.push(`${name(one)} and ${name(other)} lie over each other`);
        else if (b.bottom <= a.top + 1) found.push(`${name(other)} comes before ${name(one)}`);
      }
    });
  }
  return found;
}
