let key = "";
try { key = localStorage.getItem("oscar-key") || ""; } catch { /* private window */ }
const type = schema => schema.enum ? schema.enum.map(value => JSON.stringify(value)).join(" or ")
  : schema.oneOf ? schema.oneOf.map(type).join(" or ")
  : schema.type === "array" ? "list of " + type(schema.items) : schema.type || "any JSON";
const range = schema => [
  schema.minimum !== undefined ? "at least " + schema.minimum : "",
  schema.exclusiveMinimum !== undefined ? "above " + schema.exclusiveMinimum : "",
  schema.maximum !== undefined ? "at most " + schema.maximum : "",
].filter(Boolean).join(", ");
const load = async () => {
  const response = await fetch("/openapi.json", { headers: key ? { authorization: "Bearer " + key } : {} });
  $("locked").hidden = response.status !== 401;
  if (!response.ok) return;
  const api = await response.json();
  $("about").textContent = api.info.description + " Version " + api.info.version + ".";
  $("example").textContent = "curl " + location.origin + "/v1/chat/completions \\\n"
    + "  -H 'content-type: application/json' \\\n"
    + "  -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'";
  $("routes").replaceChildren();
  for (const [path, methods] of Object.entries(api.paths)) for (const [method, route] of Object.entries(methods)) {
    const box = make("details");
    const head = make("summary");
    head.append(make("span", "method", method.toUpperCase()), make("code", "", path), make("span", "soft", "  " + route.summary));
    box.append(head);
    const schema = route.requestBody && route.requestBody.content["application/json"].schema;
    const list = make("dl");
    for (const [name, field] of Object.entries(schema ? schema.properties : {})) {
      const term = make("dt");
      const limits = range(field);
      term.append(make("code", "", name), make("span", "soft", "  " + type(field) + (limits ? ", " + limits : "")
        + (schema.required.includes(name) ? ", required" : "")));
      list.append(term, make("dd", "", field.description));
    }
    box.append(schema ? list : make("p", "soft", "No body."));
    $("routes").append(box);
  }
};
$("locked").addEventListener("submit", event => {
  event.preventDefault();
  key = $("key").value.trim();
  try { localStorage.setItem("oscar-key", key); } catch { /* private window */ }
  load();
});
load();
