// Completes keys and values of a YAML file from its schema, and follows the page's theme.
import * as CM from "nicegui-codemirror";

const KEY = /^(\s*)([\w.*"<>=-]+):/;

// The keys above a line, outermost first, by indentation.
function parentsOf(doc, lineNumber, indent) {
  const parents = [];
  for (let number = lineNumber - 1; number > 0 && indent > 0; number--) {
    const found = KEY.exec(doc.line(number).text);
    if (found && found[1].length < indent) {
      parents.unshift(found[2].replace(/"/g, ""));
      indent = found[1].length;
    }
  }
  return parents;
}

function matches(steps, path) {
  return steps.length === path.length && steps.every((step, at) => step === "*" || step === path[at]);
}

function completeKey(keys, parents, from, typed) {
  const options = keys
    .filter((key) => key.steps.at(-1) !== "*" && matches(key.steps.slice(0, -1), parents))
    .map((key) => ({
      label: key.steps.at(-1),
      apply: key.steps.at(-1) + (key.value === "mapping" ? ":" : ": "),
      detail: key.value,
      info: key.default ? `${key.description} Default: ${key.default}.` : key.description,
      type: "property",
    }));
  return options.length ? { from, options, validFor: /^[\w.-]*$/ } : null;
}

function completeValue(keys, path, from) {
  const key = keys.find((one) => matches(one.steps, path));
  const words = key?.value === "yes/no" ? ["yes", "no"] : (key?.value ?? "").replace(/ \(or a list\)$/, "").split(", ");
  const options = words.filter((word) => words.length > 1 && /^[\w.-]+$/.test(word));
  if (!options.length) return null;
  return { from, options: options.map((label) => ({ label, type: "constant" })), validFor: /^[\w.-]*$/ };
}

function sourceOf(keys) {
  return (context) => {
    const line = context.state.doc.lineAt(context.pos);
    const before = line.text.slice(0, context.pos - line.from);
    const value = /^(\s*)([\w.-]+):\s+([\w.-]*)$/.exec(before);
    if (value) {
      const parents = parentsOf(context.state.doc, line.number, value[1].length);
      return completeValue(keys, [...parents, value[2]], context.pos - value[3].length);
    }
    const key = /^(\s*)([\w.-]*)$/.exec(before);
    if (!key || (!key[2] && !context.explicit)) return null;
    return completeKey(keys, parentsOf(context.state.doc, line.number, key[1].length), context.pos - key[2].length);
  };
}

function followTheme(component) {
  const apply = () => component.setTheme(document.body.classList.contains("body--dark") ? "githubDark" : "githubLight");
  apply();
  new MutationObserver(apply).observe(document.body, { attributes: true, attributeFilter: ["class"] });
}

export async function attach(component, label, keys) {
  await component.editorPromise;
  followTheme(component);
  const source = sourceOf(keys.map((key) => ({ ...key, steps: key.path.split(".") })));
  component.editor.dispatch({
    effects: CM.StateEffect.appendConfig.of([
      CM.EditorState.languageData.of(() => [{ autocomplete: source }]),
      CM.EditorView.contentAttributes.of({ "aria-label": label }),
    ]),
  });
}
