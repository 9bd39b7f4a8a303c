// Browsers start no Worker in pages that are opened from a folder, and the search needs one: here a
// hidden frame takes its place. (mkdocs-material would load a script for this from elsewhere.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise(resolve => frame.addEventListener("load", resolve, { once: true }))
      frame.srcdoc = `<body><script>
        const send = parent.postMessage.bind(parent)
        window.postMessage = message => send(message, "*")
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() =>
          new Promise(resolve => {
            const script = document.createElement("script")
            script.src = url
            script.onload = resolve
            document.body.append(script)
          })), Promise.resolve())
        <\/script><script src="${url}"><\/script></body>`
      document.body.append(frame)
      this.frame = frame
      window.addEventListener("message", ({ source, data }) => {
        if (source !== frame.contentWindow) return
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      })
    }
    postMessage(message) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: message })))
    }
    terminate() { this.frame.remove() }
  }
}
