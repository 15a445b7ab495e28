/* Search when the site is opened as files: browsers refuse workers there, so the script of the worker runs in a hidden
   frame. It takes the place of a script that the theme would load from another host. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside = new Promise((loaded) => {
        const script = frame.contentDocument.createElement("script");
        script.src = address;
        script.onload = () => loaded(inside);
        frame.contentDocument.body.append(script);
      });
    }

    async postMessage(data) {
      const inside = await this.inside;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }
  };
}
